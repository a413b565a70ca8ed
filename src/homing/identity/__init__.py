"""Which session does this request name?"""
