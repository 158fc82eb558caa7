"""Generation: requests that run step by step on record, and their replay."""
