"""How are many rollouts collected, without a fault that counts as a reward and without doing anything twice?"""
