"""Generation: requests that run step by step and are recorded, and their replay."""
