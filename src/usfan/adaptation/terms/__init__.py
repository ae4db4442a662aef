"""Terms of the loss of stage 2, one per module. A term is a value in a method's row (its settings are its
fields), and `started` makes the running term: a copy with tables and the `Context` of the run."""
