"""Who proposes the next recipe: one file per kind, each answering `state.Proposer`."""
