"""What commands name; no test of a parser starts it."""
