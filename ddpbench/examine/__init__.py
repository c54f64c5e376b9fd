"""What the doctor looks at: one module an examination, `examine(context)` in every rank."""
