"""Speech, transcripts and translations of sound: requests, answers, subtitles."""

__all__: list[str] = []
