"""Tools by `mpips NAME`: report, watch, trace, replay, doctor, plan, results, guide, bench."""
