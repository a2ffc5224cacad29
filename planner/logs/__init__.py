"""The lines that training runs print become measured steps, beside the plan of the run."""
