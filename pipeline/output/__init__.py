"""A run's folder: whose it is, how far it is, the mark that it is done, and what is said of it at the end."""
