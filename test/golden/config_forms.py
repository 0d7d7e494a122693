"""The two ways in which config.json can express a model's rotary settings. Needs only Python's standard library."""


def flat_form(config):
    """Returns config.json with its rotary settings as transformers 4 wrote them: rope_theta at the top, scaling in
    rope_scaling."""
    config = dict(config)
    parameters = config.pop("rope_parameters", None)
    if parameters is None:
        return config
    if "full_attention" in parameters:
        if config["model_type"] == "gemma3_text":
            config["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        parameters = parameters["full_attention"]
    scaling = dict(parameters)
    neox = config["model_type"] == "gpt_neox"
    config["rotary_emb_base" if neox else "rope_theta"] = scaling.pop("rope_theta")
    if "partial_rotary_factor" in scaling:
        config["rotary_pct" if neox else "partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    config["rope_scaling"] = scaling if scaling["rope_type"] != "default" else None
    return config


def nested_form(config):
    """Returns config.json with all rotary settings in rope_parameters, as transformers 5 writes them."""
    config = dict(config)
    if "rope_parameters" in config or config["model_type"] == "gpt2":
        return config
    parameters = {"rope_type": "default", **(config.pop("rope_scaling", None) or {})}
    for old, new in (("rope_theta", "rope_theta"), ("rotary_emb_base", "rope_theta"), ("rotary_pct", "partial_rotary_factor"),
                     ("partial_rotary_factor", "partial_rotary_factor")):
        if old in config:
            parameters[new] = config.pop(old)
    return {**config, "rope_parameters": parameters}
