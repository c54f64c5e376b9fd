"""What the doctor looks at: one module an examination, `examine(patient)` in every rank."""
