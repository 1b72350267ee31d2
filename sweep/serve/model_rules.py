"""The messages about the model: where it is, who may have it, and what it, the device or the build cannot do."""

from __future__ import annotations

from sweep.serve.rule import CONSEQUENCE, MODULE, SYMPTOM, rule

_REFUSED = (
    rf"^(?:{MODULE}(?:Value|Runtime|Type|Assertion|NotImplemented)Error(?:: |\(['\"])"
    r"|(?:Value error|Assertion failed), )(?!(?:CUDA|HIP|XPU) (?:driver )?error)"
)

MODEL_RULES = (
    rule(
        "auth_gated_model",
        "abort_sweep",
        r"gated repo|GatedRepoError|Invalid username or password|Invalid user token|LocalTokenNotFoundError"
        r"|Make sure to have access to it at|awaiting a review from the repo authors"
        r"|Access to model .{1,200} is restricted"
        r"|Token is required|not in the authorized list",
    ),
    rule(
        "auth_gated_model",
        "abort_sweep",
        r"\b40[13] Client Error|HTTP Error 40[13]\b",
        rank=SYMPTOM,
    ),
    rule(
        "trust_remote_code_needed",
        "abort_sweep",
        r"requires you to execute the \w+ file|contains custom code which must be executed"
        r"|pass the argument `trust_remote_code=True`|option `trust_remote_code=True`"
        r"|Do you wish to run the custom code"
        r"|consider setting `trust_remote_code=True`",
    ),
    rule(
        "model_not_found",
        "retry",
        r"HTTPSConnectionPool\(host='[\w.-]{0,80}(?:huggingface|hf|modelscope)\.c[on]|using `hf_transfer`"
        r"|\b429 Client Error|\b50\d Server Error|Too Many Requests for url|ReadTimeoutError\("
        r"|Read timed out\. \(read timeout",
        "The model hub answers too slowly or too seldom: try again later, or download the model first.",
        rank=SYMPTOM,
    ),
    rule(
        "model_not_found",
        "abort_sweep",
        r"LocalEntryNotFoundError|RepositoryNotFoundError"
        r"|RevisionNotFoundError|EntryNotFoundError|Cannot find any model weights|404 Client Error|HFValidationError"
        r"|is not a valid model identifier|does not appear to have a file named|is not a valid git identifier"
        r"|Can't load the configuration of|Can't load tokenizer for|couldn't connect to 'https?://|OfflineModeIsEnabled"
        r"|Unrecognized model in |No supported config format found|Could not detect config format"
        r"|MetadataIncompleteBuffer|HeaderTooLarge|Error while deserializing header|couldn't find (?:it"
        r"|them) in the cached"
        r"|Unsupported config format|UnpicklingError: invalid load key"
        r"|No such file or directory: '[^']{0,300}(?:config\.json|\.safetensors|\.gguf|tokenizer\w*\.json)"
        r"|Cannot find an appropriate cached snapshot",
    ),
    # For a folder vLLM logs it as an error, and goes on.
    rule(
        "model_not_found",
        "abort_sweep",
        r"Repo id must be in the form|Repo id must use alphanumeric",
        doubtful=True,
    ),
    rule(
        "model_not_found",
        "abort_sweep",
        r"Invalid repository ID or local directory",
        rank=SYMPTOM,
    ),
)

FEATURE_RULES = (
    rule(
        "unsupported_feature",
        "abort_sweep",
        r"Model architectures? .{0,200}(?:are|is) not supported|has no vLLM implementation and the Transformers",
        "This vLLM does not know the model's architecture: take a newer vLLM, or another model.",
    ),
    rule(
        "unsupported_feature",
        "abort_sweep",
        r"out of resource: shared memory|OutOfResources",
        "A kernel for this quantization is too large for this GPU: take another checkpoint, or a newer vLLM.",
        flags=("quantization", "kv-cache-dtype", "attention-backend"),
    ),
    rule(
        "invalid_argument",
        "prune",
        r"No valid attention backend found.{0,2000}block_size not supported",
        "No attention backend takes this block size with these flags: take another block-size, or leave it out.",
        flags=("block-size",),
    ),
    rule(
        "unsupported_feature",
        "prune",
        r"not supported for the current GPU|not supported in this architecture"
        r"|is not supported for this model|is not valid for this configuration\. Reason"
        r"|Number of experts in the model must be greater than 0|does not (?:yet )?support: "
        r"|Bfloat16 is only supported on GPUs|Unknown quantization method|No valid attention backend found"
        r"|No valid (?:CPU )?MLA prefill backend|Invalid attention backend for"
        r"|is not supported for quantization method",
    ),
    rule(
        "unsupported_feature",
        "prune",
        rf"{_REFUSED}.{{0,400}}(?:not (?:yet |currently )?(?:been )?(?:supported|implemented|available)"
        r"|(?:not|n't) (?:yet |currently )?support\b|[Uu]nsupported|only (?:be )?(?:supports?|supported|available"
        r"|works?)\b"
        r"|(?:not |in)compatible|requires? (?:NVIDIA|CUDA|Triton|ROCm|compute capability|Model Runner|Hopper|Blackwell"
        r"|FlashInfer|a GPU)|Supported head sizes|currently supports|has been removed|no kernel for)",
        words=("support", "ompatible", "implemented", "only ", "available", "require", "has been removed"),
        rank=SYMPTOM,
    ),
    rule(
        "unsupported_feature",
        "prune",
        r"^NotImplemented\w*Error\b|^ImportError: .{0,200}is required (?:for|to)\b",
        rank=CONSEQUENCE,
    ),
)
