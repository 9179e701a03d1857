"""How close to the limit: the 2:4 product, its host time, compression and reduction against their floors."""
