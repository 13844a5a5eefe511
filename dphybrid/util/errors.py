"""The one error meant for people: programs turn it into a message and exit code 2."""

from dphybrid.util.masking import masked


class UserError(ValueError):
    """Wrong input, told so that it can be mended: the value, where it was found, and the remedy.

    Raised before work starts, or after what was begun has been put away. Its text shows no passwords of addresses.
    """

    def __str__(self) -> str:
        return masked(super().__str__())
