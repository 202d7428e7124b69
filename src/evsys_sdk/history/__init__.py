"""Looking back: the experiments on this disk, which one a name means, comparison, leaderboard, context."""
