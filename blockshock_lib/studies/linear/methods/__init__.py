"""The table of methods: a new one is a file with its row and costs, and an entry below. Imports no torch."""

from blockshock_lib.studies.linear.methods import block_shock, dense
from blockshock_lib.studies.linear.methods.method import Method

METHODS: dict[str, Method] = {row.name: row for row in (*dense.ROWS, *block_shock.ROWS)}
