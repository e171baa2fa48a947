"""Token streams in, rows of finished documents out: who goes into a step, the step itself, and what comes of it. No files, no Ray."""
