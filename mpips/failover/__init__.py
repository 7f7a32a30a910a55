"""Failover after a rank's death: policy, takeover, undo log, resending."""
