"""Write clicks.svm: which visitors of which sites click on which ads, as libsvm text.

    python jobs/make_clicks.py jobs/clicks.svm [SAMPLES]

A line is one view: whether it was clicked, and three features of 1: the site, the ad, the hour.
Sites and ads have a pull of their own; and each has a taste, of which a click depends more on
whether the two agree. A model without pairs of features cannot see that.
"""

import sys

import numpy as np

SITES, ADS, HOURS = 30, 20, 10


def main(path: str, samples: int = 4000) -> None:
    """Write so many lines."""
    rng = np.random.default_rng(1)
    pulls = rng.normal(0, 1, SITES), rng.normal(0, 1, ADS)
    tastes = rng.choice([-1, 1], (SITES, 2)), rng.choice([-1, 1], (ADS, 2))
    site, ad, hour = (rng.integers(count, size=samples) for count in (SITES, ADS, HOURS))
    agree = (tastes[0][site] * tastes[1][ad]).sum(axis=1)
    logit = pulls[0][site] + pulls[1][ad] + 2 * agree
    clicked = rng.random(samples) < 1 / (1 + np.exp(-logit))
    with open(path, "w") as file:
        for y, *ids in zip(clicked, 1 + site, 1 + SITES + ad, 1 + SITES + ADS + hour, strict=True):
            file.write(f"{int(y)} " + " ".join(f"{k}:1" for k in ids) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
