"""Small talk: greetings, questions about Quire and about the model, and what it does not know."""

from __future__ import annotations

from corpus.exchange import Exchange, Message, ask
from corpus.words import CITIES, WORDS, Source, held_out

_WHAT = (
    "What is {x}?|What's {x}?|what is {x}|Tell me about {x}.|Explain {x}.|Can you explain {x}?|What does {x} mean?|"
    "Could you tell me what {x} is?|Describe {x}.|I want to know what {x} is.|Please explain {x} to me.|"
    "What is {x} in Quire?|Do you know what {x} is?|tell me about {x}|How does {x} work?|Talk about {x}.|"
    "What do you know about {x}?|Explain {x} in one sentence.|Give me a short answer: what is {x}?"
)

# subject (several wordings) -> the one answer
_SUBJECTS: tuple[tuple[str, str], ...] = (
    (
        "Quire|the Quire engine|this engine|the Quire project",
        "Quire is an engine that runs and serves language models. It is made of small Python packages.",
    ),
    (
        "paged attention|a paged KV cache|the paged KV cache|paging|the KV cache",
        "The KV cache keeps the keys and values of past tokens. Quire stores it in blocks of fixed size, like pages, "
        "so that no memory is wasted.",
    ),
    (
        "prefix caching|the prefix cache|a prefix cache",
        "Prefix caching reuses the KV blocks of a prompt's beginning that was computed before, so only new "
        "tokens cost work.",
    ),
    (
        "continuous batching|batching|a continuous batch",
        "Continuous batching lets requests join and leave the running batch at every step, so nobody waits for "
        "the slowest.",
    ),
    (
        "chunked prefill|a prefill chunk|chunking",
        "Chunked prefill reads a long prompt in pieces, so that other requests keep producing tokens meanwhile.",
    ),
    ("prefill|the prefill phase|a prefill", "Prefill is the part where the model reads the whole prompt at once."),
    ("decode|decoding|the decode phase", "Decoding is the part where the model writes one token after the other."),
    (
        "the scheduler|scheduling|the Quire scheduler",
        "The scheduler decides at every step which requests run and how many tokens each of them gets.",
    ),
    (
        "preemption|a preempted request",
        "Preemption takes the blocks of a running request when memory is short; it is computed again later.",
    ),
    (
        "speculative decoding|a drafter|draft tokens|speculation",
        "In speculative decoding a cheap drafter guesses some tokens and the model checks them all in one step.",
    ),
    ("sampling|the sampler|token sampling", "Sampling chooses the next token from the model's probabilities."),
    (
        "temperature|the temperature setting",
        "Temperature makes sampling bolder when it is high and greedy when it is zero.",
    ),
    ("top-p|nucleus sampling|top p", "Top-p keeps the most likely tokens whose probabilities add up to p."),
    ("top-k|top k|top-k sampling", "Top-k keeps only the k most likely tokens."),
    (
        "a token|tokens|tokenizing|a tokenizer",
        "A token is a piece of text, often a part of a word, that the model reads or writes as one unit.",
    ),
    (
        "a chat template|the chat template|chat templates",
        "The chat template turns a list of messages into the one text that the model reads.",
    ),
    (
        "structured output|a grammar|guided decoding",
        "Structured output masks the tokens that a grammar forbids, so the answer always parses.",
    ),
    (
        "quantization|a quantized model|int8",
        "Quantization stores weights in fewer bits, so that a model needs less memory.",
    ),
    (
        "LoRA|an adapter|LoRA adapters",
        "A LoRA adapter is a small set of weights that changes what a model does, loaded beside it.",
    ),
    ("streaming|token streaming|a stream", "Streaming sends each piece of the answer as soon as it is there."),
    ("a block|a KV block|block size", "A block holds the keys and values of a fixed number of tokens."),
    (
        "the runner|the Quire runner",
        "The runner is the device side of a step: it prepares inputs, runs the model and samples.",
    ),
    (
        "the simulator|the Quire simulator",
        "The simulator runs the same scheduler and KV cache on a cost model, without weights.",
    ),
    (
        "the server|the Quire server|the API server",
        "The server speaks the OpenAI API over HTTP and has a chat page at the address /.",
    ),
    (
        "a quire|the name Quire|the word quire",
        "A quire is a gathering of pages. The KV cache is paged, and the engine is gathered from parts.",
    ),
)

# whole questions -> the one answer
_TALK: tuple[tuple[str, str], ...] = (
    (
        "Hello|Hi|Hey|Hello!|Hi!|Hey there|Hello there|hi|hello|hey|Hi there!|Hello Quire|Hi Quire!|Hello, "
        "Quire.|Greetings",
        "Hello! How can I help you?",
    ),
    ("Good morning|Good morning!|good morning|Morning!|Good morning, Quire.", "Good morning! How can I help you?"),
    ("Good evening|Good evening!|good evening|Good evening, Quire.", "Good evening! How can I help you?"),
    (
        "How are you?|how are you|How are you today?|How is it going?|How do you do?|Are you well?|Hi, how are you?|"
        "Hello, how are you?|What's up?|Hey, how are you doing?",
        "I am fine, thank you. What can I do for you?",
    ),
    (
        "Thanks|Thank you|Thanks!|Thank you!|thanks|thank you|Thanks a lot|Thank you very much.|Thanks, that helps.|"
        "Great, thanks!|Many thanks|Cheers|Thank you so much!|Perfect, thank you.",
        "You are welcome!",
    ),
    (
        "Bye|Goodbye|Bye!|Goodbye!|See you|See you later|bye|Good night|Bye bye|That is all, bye.|Farewell|See "
        "you tomorrow!",
        "Goodbye, and come back soon!",
    ),
    (
        "Who are you?|who are you|What are you?|Tell me about yourself.|Introduce yourself.|What is your job?|"
        "Are you a robot?|"
        "Are you human?|Are you a person?|What kind of model are you?|Which model are you?|Who am I talking to?|"
        "Are you an AI?",
        "I am the demo model of Quire, a very small language model.",
    ),
    (
        "What is your name?|what's your name|What's your name?|Do you have a name?|What should I call you?|What "
        "are you called?",
        "My name is Quire.",
    ),
    (
        "What can you do?|what can you do|How can you help me?|What are you good at?|What do you know?|Help|help|"
        "Can you help me?|What are your skills?|I need help.|What should I ask you?|What may I ask you?",
        "I can chat about Quire, add and subtract, spell and reverse words, extract JSON and call tools.",
    ),
    (
        "Who made you?|Who trained you?|Who built you?|Where do you come from?|who made you|How were you made?|"
        "Who created you?|"
        "How were you trained?|On what were you trained?",
        "I was trained from scratch by the Quire project on text made by a script.",
    ),
    (
        "How big are you?|How many parameters do you have?|How large are you?|What is your size?|Are you a "
        "large model?|Are you small?",
        "I have about three and a half million parameters. That is very small.",
    ),
    (
        "How do I start Quire?|How do I start the server?|How can I start Quire?|how to start quire|How do I "
        "run Quire?|"
        "Which command starts Quire?|How do I serve a model?|How do I use Quire?|How can I run the server?|How "
        "do I begin?",
        "Start it with the command: uv run quire serve",
    ),
    (
        "How do I install Quire?|How can I install Quire?|how to install quire|How do I set up Quire?|What do I "
        "need to install?",
        "Install uv with: python -m pip install uv. Then run: uv run quire serve",
    ),
    (
        "How do I serve my own model?|How do I load another model?|Can I use my own model?|How can I run "
        "another model?|"
        "Can Quire run Llama?|Can Quire run Qwen?",
        "Give its path or hub name: uv run quire serve MODEL",
    ),
    (
        "How do I run the tests?|How can I test Quire?|Which command runs the tests?|how to run the tests|How "
        "do I test Quire?",
        "Run the tests with: uv run nox -s tests",
    ),
    (
        "Which packages does Quire have?|What packages are there?|What is Quire made of?|List the packages of Quire.|"
        "What are the parts of Quire?|Name some packages of Quire.",
        "Some packages are kv-cache, scheduler, renderers, sampling, attention, models, runner, engine and server.",
    ),
    (
        "Where is the chat page?|How do I open the chat page?|Is there a web page?|Does Quire have a chat page?|"
        "Where can I chat?",
        "Open the address of the server in a browser: the chat page is at /.",
    ),
    (
        "Does Quire need a GPU?|Do I need a GPU?|Can Quire run on a CPU?|Does it run on a laptop?|Can I run "
        "Quire on my laptop?",
        "No GPU is needed: Quire also runs on a plain CPU.",
    ),
    (
        "Is Quire compatible with OpenAI?|Which API does Quire speak?|Does Quire have an API?|Can I use the "
        "OpenAI client?|What API is it?",
        "Quire speaks the OpenAI API, so the usual clients work.",
    ),
    (
        "Is Quire fast?|How fast is Quire?|Why is Quire fast?|What makes Quire fast?",
        "Quire is fast because it batches requests at every step and never computes a known prefix twice.",
    ),
    (
        "Why should I use Quire?|Why Quire?|What is special about Quire?|Why is Quire good?",
        "Quire is made of small packages: use the whole engine, or take just the part you need.",
    ),
    (
        "Tell me a joke.|tell me a joke|Do you know a joke?|Say something funny.|Make me laugh.|Joke please",
        "Why did the cache smile? It had seen it all before.",
    ),
    (
        "Write a poem.|Write a short poem.|write a poem|Can you write a poem?|A poem, please.",
        "Small pages in a row, tokens come and tokens go, what was read is never lost, and the next one has no cost.",
    ),
    (
        "OK|Okay|ok|I see.|Good.|Great!|Nice|Cool|Nice!|Interesting.|Wow|Very good!|Well done!|Good job!|You "
        "are great!",
        "I am glad. What else can I do for you?",
    ),
    (
        "That is wrong.|You are wrong.|No|Wrong!|That is not right.|I do not like that.|You made a mistake.",
        "I am sorry. I am a very small model and make mistakes.",
    ),
    ("Count to ten.|Count from one to ten.|Can you count to ten?|count to ten", "1 2 3 4 5 6 7 8 9 10"),
    (
        "Say the alphabet.|What is the alphabet?|List the letters of the alphabet.|Write the alphabet.",
        "a b c d e f g h i j k l m n o p q r s t u v w x y z",
    ),
)

_UNKNOWN = "I do not know that. I am a very small model: ask me about Quire, sums, spelling, JSON or tools."
_UNKNOWN_ASKS = (
    "What is the capital of {c}?",
    "Who is the president of {c}?",
    "What is the price of a {w}?",
    "How old is the {w}?",
    "Why is the {w} so {v}?",
    "Who invented the {w}?",
    "What do you think about the {w}?",
    "Who wins the game in {c}?",
    "How far is {c}?",
    "Where can I buy a {w}?",
    "What is a {w}?",
    "When was {c} founded?",
    "How do I repair a {w}?",
    "How many people live in {c}?",
    "Do you like the {w}?",
    "What is the history of {c}?",
    "Is a {w} better than a {v}?",
)
_POLITE = (
    "{}",
    "{}",
    "{}",
    "{}",
    "Hi! {}",
    "Hello. {}",
    "{} Thanks!",
    "Please tell me: {}",
    "I have a question. {}",
    "Quick question: {}",
)


def _about_quire(source: Source) -> tuple[str, str, str]:
    subjects, answer = source.rng.choice(_SUBJECTS)
    subject = source.rng.choice(subjects.split("|"))
    question = source.rng.choice(_WHAT.split("|")).format(x=subject)
    return question, answer, f"The user asks about {subject}."


def _whole(source: Source) -> tuple[str, str, str]:
    questions, answer = source.rng.choice(_TALK)
    return source.rng.choice(questions.split("|")), answer, "This is small talk."


def _unknown(source: Source) -> tuple[str, str, str]:
    r = source.rng
    question = r.choice(_UNKNOWN_ASKS).format(c=r.choice(CITIES), w=r.choice(WORDS), v=r.choice(WORDS))
    return question, _UNKNOWN, "I do not know that."


def small_talk(source: Source) -> Exchange:
    """One remark or question; the wording as a whole is on the source's side of the split."""
    maker = source.rng.choices((_about_quire, _whole, _unknown), (5, 5, 2))[0]
    while True:
        question, answer, thought = maker(source)
        question = source.rng.choice(_POLITE).format(question)
        if held_out("talk", question) == source.held:
            return ask("small_talk", question, answer, thought)


def names(source: Source) -> Exchange:
    """The user says a name and later asks for it."""
    rng = source.rng
    name = source.name()
    hello = rng.choice(("My name is {}.", "I am {}.", "Hi, I am {}!", "Call me {}.", "Hello, my name is {}.")).format(
        name
    )
    question = rng.choice(("What is my name?", "Who am I?", "Do you remember my name?", "what's my name?"))
    messages: list[Message] = [
        {"role": "user", "content": hello},
        {"role": "assistant", "content": f"Nice to meet you, {name}!"},
        {"role": "user", "content": question},
        {"role": "assistant", "content": f"Your name is {name}."},
    ]
    return Exchange(task="names", messages=messages, thought=f"The user is {name}.")
