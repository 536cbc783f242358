"""A machine goes in; how fast each of its devices computes, copies and answers comes out, measured and kept."""
