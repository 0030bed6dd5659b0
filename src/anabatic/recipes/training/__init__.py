"""Training commands: pretrain, sft, dpo, reward, rl."""
