"""What the configs of all families share."""


class TokenIds:
    """Configs with `eos_token_id`, one id or several."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        ids = self.eos_token_id
        return () if ids is None else tuple(ids) if isinstance(ids, (tuple, list)) else (ids,)


OPTConfig = None
