"""How long does ownership last?"""
