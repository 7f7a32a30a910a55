"""Death of a rank while the others go on: policy, takeover, undo log, resending."""
