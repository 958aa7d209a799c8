"""What a night or a comparison leaves on GitHub: an issue per machine, a comment per pull request.

Nothing here measures or judges.
"""
