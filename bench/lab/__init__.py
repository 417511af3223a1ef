"""What the published tables of bench/ say, put to the program: rows become questions, answers become errors."""
