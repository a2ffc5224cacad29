"""Published steps are priced, and the errors of the prices are scored."""
