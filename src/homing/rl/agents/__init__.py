"""What does an agent server keep of a session, and how does an agent run in it?"""
