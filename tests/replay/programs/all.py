"""Records the runs of the other programs here, in one world."""

import sys

import linear
import net
import rows

if __name__ == "__main__":
    out = sys.argv[1]
    for dtype, codec in (("float64", "none"), ("float32", "int8")):
        for _ in ("stopped", "ended"):
            assert linear.main(f"{out}/linear-{dtype}", 2, dtype, codec) == 0
    assert rows.main(f"{out}/rows") == 0
    sys.exit(net.main(f"{out}/net", 2))
