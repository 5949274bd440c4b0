"""Programs as Paddle built them for the models of the road, stored, and plans of them under every place's rules."""
