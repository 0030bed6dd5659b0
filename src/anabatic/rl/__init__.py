"""Reinforcement learning: rollouts, rewards, advantages and losses; the loop is `train`'s."""
