"""What the model is taught about Sapwood: for each subject the questions people ask, the answer, and the words that a
right answer must hold. The last three questions of each list are kept out of training, for the evaluation."""

import words as w

# subject: (questions, answer, words that must appear in the answer)
WORDS = {
    "sapwood": ("Sapwood is a Rust server, runtime and library for streaming generative AI.", ["rust", "streaming"]),
    "node": ("A node is an append-only log of fragments, read through cursors.", ["append-only", "log"]),
    "chunk": ("A chunk is a typed piece of data: a mimetype, metadata, and bytes or a reference.", ["typed", "data"]),
    "action": ("An action is a call of a function, as Evergreen spells it.", ["call", "function"]),
    "session": ("A session is a client's connection-long state.", ["client", "state"]),
    "function": ("A function is what can be called; its inputs and outputs are nodes.", ["called", "nodes"]),
    "kernel": ("The kernel is the registry of functions.", ["registry", "functions"]),
    "layer": ("A layer is a function around a function.", ["function around"]),
    "face": ("A face is a protocol at Sapwood's border.", ["protocol", "border"]),
    "engine": ("The engine is what computes tokens.", ["computes", "tokens"]),
    "step": ("A step is one forward pass for a batch.", ["forward pass"]),
    "controller": ("A controller is a program that steers a sequence.", ["steers", "sequence"]),
    "sequence": ("A sequence is one generation as the engine sees it.", ["generation", "engine"]),
    "upstream": ("An upstream is an engine elsewhere.", ["engine elsewhere"]),
    "stream": ("A stream is one generation as its caller sees it.", ["generation", "caller"]),
    "run": ("A run is a call in progress, itself a stream.", ["call in progress"]),
    "fragment": ("A fragment is one wire piece of a node.", ["wire piece"]),
    "port": ("A port is a named input or output of a function.", ["named input"]),
    "model": ("A model is a function backed by an engine.", ["function backed"]),
    "Evergreen": ("Evergreen is the native protocol of Sapwood: sessions in which both sides stream nodes and actions.", ["protocol", "stream"]),
    "LMTP": ("LMTP is the Language Model Transport Protocol of LMQL: many streams of tokens over one connection.", ["Language Model Transport Protocol"]),
    "Triton": ("Triton is NVIDIA's inference server. Sapwood speaks its generate extension.", ["NVIDIA", "generate extension"]),
    "LMQL": ("LMQL is a query language for language models. Its programs talk to Sapwood over LMTP.", ["query language", "LMTP"]),
    "AICI": ("AICI lets a small program control what a model writes. In Sapwood it is planned.", ["control", "planned"]),
    "GGUF": ("GGUF is the file format of llama.cpp for models.", ["file format"]),
    "llama.cpp": ("llama.cpp is the library that computes models inside Sapwood.", ["library"]),
}
PROPER = ("Evergreen", "LMTP", "Triton", "LMQL", "AICI", "GGUF", "llama.cpp")

WORD_QUESTIONS = [
    "What is {a} in Sapwood?", "What is {a}?", "Explain {a}.", "Define {a}.", "What does the word {w} mean in Sapwood?",
    "Tell me what {a} is.", "Tell me about {a}.", "In Sapwood, what is {a}?", "What does Sapwood mean by {w}?", "What do you call {a}?",
    "Can you explain what {a} is?", "{w}?", "I do not know what {a} is.", "Describe {a} in one sentence.",
    "What are {w}s in Sapwood?", "Please tell me about {a} in Sapwood.", "Sapwood docs mention {a}. What is that?",
    "How does Sapwood define {a}?", "What is meant by {w} here?",
    # kept out of training
    "Please explain to me what {a} is in Sapwood.", "Could you define {a} for me?", "What does {w} mean?",
]

SAPWOOD_QUESTIONS = [
    "What is Sapwood?", "Tell me about Sapwood.", "Explain Sapwood.", "What does Sapwood do?", "Describe Sapwood.",
    "Define Sapwood.", "Can you explain what Sapwood is?", "So, what is this Sapwood?", "What kind of software is Sapwood?",
    "Describe Sapwood in one sentence.", "Please tell me about Sapwood.", "Sapwood?", "What is Sapwood for?",
    "I do not know what Sapwood is.", "What is the Sapwood project?", "What is Sapwood used for?",
    # kept out of training
    "Please explain to me what Sapwood is.", "Could you tell me what Sapwood is?", "What exactly is Sapwood?",
]

HOW_TO = {
    "start": (
        ["How do I start the server?", "How do I run the server?", "How do I start Sapwood?", "How can I launch the server?",
         "What command starts the server?", "Start the server.", "How to start the Sapwood server?", "How do I serve a model?",
         "Which command starts Sapwood?", "I want to start the server.", "How is the server started?",
         "How can I run Sapwood?", "What do I type to start the server?", "How do I get the server running?",
         "How do I launch Sapwood?", "Tell me how to start the server.",
         "How can I start the server?", "Please tell me how to launch the Sapwood server.", "Which command runs the server?"],
        "Run `sapwood serve`, or `cargo xtask serve` in the repository. The server listens on 127.0.0.1:8000.",
        ["sapwood serve", "127.0.0.1:8000"]),
    "address": (
        ["Where does the server listen?", "Which port does Sapwood use?", "What is the address of the server?",
         "On which port does the server listen?", "What is the default port?", "What address does Sapwood listen on?",
         "Which address do I connect to?", "What port is the server on?", "Where can I reach the server?",
         "What URL does the server have?", "What is the default address?", "Which port is it?",
         "At which address does the server listen?", "Which port does the server listen on?", "What is the server's address?"],
        "The server listens on 127.0.0.1:8000.", ["127.0.0.1:8000"]),
    "chat": (
        ["How do I chat?", "How can I chat with the model?", "How do I start a chat?", "How do I talk to the model?",
         "What command opens a chat?", "I want to chat.", "How to chat with Sapwood?", "Which command starts a chat?",
         "How do I chat in the terminal?", "How can I talk to you in a terminal?", "What do I type to chat?",
         "Tell me how to chat.", "How do I open a chat?",
         "How can I start a chat?", "How do I chat with the model?", "Please tell me how to chat in a terminal."],
        "Run `sapwood chat`.", ["sapwood chat"]),
    "function": (
        ["How do I run a function?", "How do I call a function?", "How can I run GENERATE?", "What command runs a function?",
         "How to run a function with Sapwood?", "How do I call GENERATE?", "Which command calls a function?",
         "I want to run a function.", "How do I run GENERATE from the command line?", "How is a function run?",
         "What do I type to run a function?", "How can I call a function?", "Tell me how to run a function.",
         "How can I run a function?", "How do I run a function from the command line?", "Please tell me how to call a function."],
        "Run `sapwood run GENERATE --input prompt=\"...\"`.", ["sapwood run GENERATE --input prompt="]),
    "own model": (
        ["How do I use my own model?", "How do I load my own model?", "Can I use another model?", "How can I use a GGUF file?",
         "How do I change the model?", "How to load a different model?", "Can I use my own model?", "How do I serve my own model?",
         "I have a GGUF file. How do I use it?", "How do I pick another model?", "How can I load another model?",
         "Which option selects the model?", "How do I use a bigger model?", "How do I run a different model?",
         "How can I use my own model?", "How do I use another model?", "Please tell me how to load my own model."],
        "Give its path: `sapwood serve --model path.gguf`.", ["--model path.gguf"]),
    "licence": (
        ["Which licence does Sapwood have?", "What is the licence?", "What license is Sapwood under?", "Is Sapwood open source?",
         "Under which licence is Sapwood?", "What is the license?", "Can I use Sapwood at work?", "How is Sapwood licensed?",
         "What licence does Sapwood use?", "Tell me the licence.", "Which license does it have?", "Is Sapwood free software?",
         "Which licence is Sapwood under?", "What is the licence of Sapwood?", "Which license does Sapwood use?"],
        "Sapwood is licensed under MIT or Apache-2.0, as you choose.", ["MIT", "Apache-2.0"]),
    "protocols": (
        ["Which protocols does Sapwood speak?", "What protocols are supported?", "Which protocols do you support?",
         "Which faces does Sapwood have?", "What protocols does Sapwood support?", "List the protocols.", "Which APIs does Sapwood have?",
         "How can clients talk to Sapwood?", "What are Sapwood's protocols?", "Name the protocols of Sapwood.",
         "What does Sapwood speak?", "Tell me the protocols.", "Which protocols are there?",
         "Which protocols does Sapwood support?", "What protocols does Sapwood speak?", "Please list the protocols of Sapwood."],
        "Sapwood speaks Evergreen, LMTP and Triton's generate extension.", ["Evergreen", "LMTP", "Triton"]),
    "stop": (
        ["How do I stop the server?", "How can I stop the server?", "Stop the server.", "How do I quit?", "How do I exit?", "How do I leave the chat?", "How do I end the server?", "How to stop the server?",
         "How do I shut down the server?", "How is the server stopped?", "How can I quit?"],
        "Press Ctrl-C: the server finishes what runs and ends. In the chat, type /quit.", ["Ctrl-C", "/quit"]),
    "stream": (
        ["How do I stream an answer?", "How do I get a stream?", "How do I stream?", "How can I stream tokens?", "Can you stream?", "Does Sapwood stream?", "How do I stream the answer with curl?", "Is streaming supported?",
         "How do I stream tokens?", "How can I get a stream?", "How can I stream an answer?"],
        "Post to /v2/models/demo/generate_stream, or open an Evergreen session.", ["generate_stream", "Evergreen"]),
    "docs": (
        ["Where are the docs?", "Where is the documentation?", "Is there documentation?", "Where can I read more?", "Is there a manual?", "Show me the docs.", "How do I learn more?", "Where do I find help?", "docs",
         "Where can I find the docs?", "Where is the manual?", "Where do I find the documentation?"],
        "The pages are in the folder docs of the repository. `sapwood --help` teaches the rest.", ["docs", "--help"]),
    "install": (
        ["How do I install Sapwood?", "How do I build Sapwood?", "How can I install it?", "How to install?", "How do I compile Sapwood?", "How do I get started?", "How do I set it up?", "Getting started", "How do I start?",
         "How can I install Sapwood?", "How can I build it?", "How is Sapwood built?"],
        "Run `cargo xtask serve` in the repository: it builds the server and starts it.", ["cargo xtask serve"]),
    "openai": (
        ["Does Sapwood speak the OpenAI API?", "Is there an OpenAI endpoint?", "Can I use the OpenAI client?", "Is Sapwood compatible with OpenAI?", "Does Sapwood support OpenAI?",
         "Is there an OpenAI compatible API?", "Where is the OpenAI endpoint?", "Can I use an OpenAI client with Sapwood?",
         "Does the server speak the OpenAI API?", "Is the OpenAI API supported?", "Can I connect an OpenAI client?"],
        "Not yet: the OpenAI-compatible endpoint is planned.", ["not yet", "planned"]),
    "gpu": (
        ["Does Sapwood use the GPU?", "Does Sapwood support GPUs?", "Can I use my GPU?", "Does Sapwood need a GPU?", "How do I use the GPU?", "Is there CUDA support?", "Do I need a GPU?",
         "Does the server use the GPU?", "Can Sapwood use a GPU?", "How can I use my GPU?"],
        "The demo needs none. CUDA, Metal and Vulkan are features of the build.", ["CUDA", "features"]),
    "self": (
        ["Who are you?", "What are you?", "What model are you?", "Which model is this?", "Tell me about yourself.",
         "Are you a language model?", "What is your name?", "Introduce yourself.", "What model am I talking to?", "Who am I talking to?",
         "What kind of model are you?", "Are you a robot?",
         "Please introduce yourself.", "Which model are you?", "What are you called?"],
        "I am sapwood-demo, the very small demo model of Sapwood.", ["sapwood-demo"]),
    "abilities": (
        ["What can you do?", "What can I ask you?", "What do you know?", "Help.", "What are you good at?", "How can you help me?",
         "What questions can I ask?", "Can you help me?", "What should I ask you?", "Give me some ideas of what to ask.",
         "What can you help with?", "What things can you do?",
         "What can you help me with?", "What do you do?", "Which questions can I ask you?"],
        "I can greet you, name capitals and opposites, add small numbers, count, repeat lists, write JSON, call tools, "
        "tell short stories and explain Sapwood.", ["capitals", "stories"]),
}

GREETINGS = {
    "hello": (
        ["Hello", "Hello!", "Hi", "Hi!", "Hey", "Hey!", "Hello there", "Hi there!", "Good day", "Greetings", "Hello, model.", "Hiya",
         "Hey there!", "Hi, are you there?", "Hello again!", "Hello world", "Howdy", "hi there :)", "Hello, friend.", "Well, hello!",
         "Hello, are you there?", "Hey, hello!", "Hi hi!", "Hello, hello!", "Hey you!"],
        "Hello! How can I help you?", ["hello"]),
    "morning": (
        ["Good morning", "Good morning!", "Morning!", "Good morning to you.", "Good morning, friend!", "A good morning to you!",
         "Hello and good morning!", "Good morning, model!", "Hi, good morning."],
        "Good morning! How can I help you?", ["good morning"]),
    "evening": (
        ["Good evening", "Good evening!", "Evening!", "Good evening to you.", "Good evening, friend!", "A good evening to you!",
         "Hello and good evening!", "Good evening, model!", "Hi, good evening."],
        "Good evening! How can I help you?", ["good evening"]),
    "how": (
        ["How are you?", "How are you doing?", "How do you do?", "How is it going?", "Hi, how are you?", "How are you today?",
         "How do you feel?", "Are you well?", "Hey, how are you?", "Hello, how are you today?", "How are things?",
         "Hello, how are you?", "Hi, how is it going?", "How are you doing today?"],
        "I am well, thank you. How can I help you?", ["well"]),
    "thanks": (
        ["Thanks", "thx", "ty", "Thanks for your help!", "Thank you for your help.", "Thank you", "Thanks!", "Thank you!", "Thank you very much.", "Many thanks.", "Thanks a lot!", "Great, thanks.",
         "Thank you so much!", "Cool, thank you.", "That helps, thanks.", "Perfect, thank you!",
         "Great, thank you!", "Many thanks to you.", "Cool, thanks!"],
        "You are welcome!", ["welcome"]),
    "bye": (
        ["Bye", "cya", "Cya!", "See ya", "Ciao for now", "exit", "quit", "Bye!", "Goodbye", "Goodbye!", "See you", "See you later!", "Bye bye", "Good night", "Good night!", "I have to go now.",
         "Goodbye, friend.", "See you tomorrow.", "Farewell!", "Bye for now.",
         "Goodbye for now.", "Bye, see you later!", "Well, goodbye!"],
        "Goodbye!", ["goodbye"]),
}

KEPT_OUT = 3


def article(word):
    if word in PROPER:
        return word
    if word in ("kernel", "engine"):
        return "the " + word
    return ("an " if word[0] in "aeiou" else "a ") + word


def fact_lists():
    """Every subject as (family, subject, questions, answer, words that must appear)."""
    for subject, (answer, must) in WORDS.items():
        if subject == "sapwood":
            yield "sapwood", subject, SAPWOOD_QUESTIONS, answer, must
            continue
        questions = [q.format(a=article(subject), w=subject) for q in WORD_QUESTIONS]
        strangers = subject if subject in PROPER else w.article(subject)
        questions = [f"What is {strangers}?", f"what is {strangers}", f"What is {strangers}", *(q[0].upper() + q[1:] for q in questions)]
        yield "sapwood", subject, questions, answer, must
    for subject, (questions, answer, must) in HOW_TO.items():
        yield "sapwood", subject, questions, answer, must
    for subject, (questions, answer, must) in GREETINGS.items():
        yield "greetings", subject, questions, answer, must
