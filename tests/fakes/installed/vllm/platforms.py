import os


class Platform:
    device_type = os.environ.get("FAKE_VLLM_PLATFORM", "cpu")

    def is_rocm(self):
        return False


current_platform = Platform()
