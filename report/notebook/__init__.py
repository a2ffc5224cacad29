"""What a notebook shows of plans, fronts and comparisons: pieces of HTML and tables of pandas."""
