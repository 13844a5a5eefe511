"""The one error meant for people: programs turn it into a message and exit code 2."""


class UserError(ValueError):
    """Wrong input, told so that it can be mended: the value, where it was found, and the remedy.

    Raised before work starts, or after what was begun has been put away.
    """
