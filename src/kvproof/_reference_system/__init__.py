"""The reference system: the milestone, its gate and the lesson, over the reference decoder."""
