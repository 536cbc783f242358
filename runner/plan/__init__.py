"""`plan`: what a run would do on a device that need not be here, and nothing is computed. `lr-find`: a rate to begin with.
`tune`: the fastest settings here."""
