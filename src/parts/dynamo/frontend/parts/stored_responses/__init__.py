"""Where answers of the Responses API are kept, for `previous_response_id` and to be read again."""

__all__: list[str] = []
