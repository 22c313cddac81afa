"""`trireme verify`: is a program the same on many devices as on one, and if not, why?"""
