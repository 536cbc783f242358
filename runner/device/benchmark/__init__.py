"""`devices --bench`: measures how fast each device computes, copies and answers, and keeps it for plans and sweeps."""
