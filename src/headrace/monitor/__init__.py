"""TODO-ROOM"""
