"""Terms of the loss of stage 2, one per module. A term is a frozen value in a method's row (its settings are its
fields), and `start` makes the running term: it allocates its tables and sees what the run knows."""
