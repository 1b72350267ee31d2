from enum import Enum


class UsageContext(Enum):
    OPENAI_API_SERVER = 1
