"""What outlives a stop, and a run: rows in journals, documents' states in carries, and states that later runs go on from."""
