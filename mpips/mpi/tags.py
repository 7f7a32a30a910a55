"""Table of all message tags.

No two kinds of messages on one communicator have the same tag. MPI promises tags up to
32767 (MPI-4.1, 9.1.2).
"""

# Of control messages, which have a communicator of their own.
TAG_CONTROL = 1
TAG_GATHER = 2

# On `Cluster.comm`.
TAG_PARTIAL = 5  # a node's sum on its way to an owner, in a round
TAG_RESULT = 6  # an owner's parameters on their way back
TAG_START = 7  # an owner's parameters and slots before the first round of low rank
TAG_PROBE = 8  # measures links at the start of a job
TAG_CLOCK = 9  # compares the hosts' clocks
TAG_PLAIN = 10  # a plain send, to compare with
TAG_WANTED = 11  # which rows of a table a worker wants of a remote server
TAG_ROWS = 12  # these rows
TAG_ROW_SUMS = 13  # a worker's gradients of an owner's rows, in a round
TAG_APPLIED = 14  # which pushes a remote server has applied, where ranks may die
TAG_SHARD = 16  # see `tag_of`
TAG_NEVER = 32000  # of no message: looked for where MPI is to get on

# On the world's communicator, which is nobody's else.
TAG_SPEAKS = 31999

HEADERS, BODIES, REPLIES = range(3)  # of pushes to a shard, and of reads of it
SHARDS_MAX = 4096  # shards with tags of their own


def tag_of(server: int, what: int) -> int:
    """Return the tag of the HEADERS, BODIES or REPLIES of a server's shard, whoever serves it."""
    return TAG_SHARD + 3 * (server % SHARDS_MAX) + what
