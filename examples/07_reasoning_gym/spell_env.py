"""An environment of the package verifiers: words of a dataset of reasoning-gym, spelled backward."""
import verifiers as vf


def load_environment(max_word_len=6):
    words = {"name": "spell_backward", "weight": 1.0,
             "config": {"min_word_len": 3, "max_word_len": max_word_len}}
    # No system message, and the reply itself is the answer.
    return vf.ReasoningGymEnv(gym=[words], num_train_examples=4000, num_eval_examples=300,
                              system_prompt="", parser=vf.Parser())
