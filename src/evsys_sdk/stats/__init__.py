"""What scores allow us to say: intervals, comparisons of arms, selection, power, the verdict."""
