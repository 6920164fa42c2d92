"""Random and mutated inputs for all that reads what others wrote: each is read, or refused by the reader's error."""
