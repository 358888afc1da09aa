"""The kinds of tools that the corpus offers: names, descriptions, parameters and ways to ask."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a kind of tool.

    Attributes:
        names: what the parameter may be called.
        value: the kind of value, a key of ``tools.VALUES``.
        description: what the schema says about it.
        choices: the allowed values, when there are few.
    """

    names: tuple[str, ...]
    value: str
    description: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of tool: the same job under many names.

    Attributes:
        verbs, nouns: the parts that a name is made of.
        descriptions: what the schema may say.
        parameters: in the order of the schema.
        requests: ways to ask, with ``{0}``, ``{1}`` for the parameters' values.
        optional: requests that leave out the last parameter, which is then not required.
    """

    verbs: tuple[str, ...]
    nouns: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    requests: tuple[str, ...]
    optional: tuple[str, ...] = ()


def _p(names: str, value: str, description: str, choices: str = "") -> Parameter:
    return Parameter(names=tuple(names.split()), value=value, description=description, choices=tuple(choices.split()))


def _k(
    verbs: str, nouns: str, descriptions: str, parameters: list[Parameter], requests: str, optional: str = ""
) -> Kind:
    def lines(text: str) -> tuple[str, ...]:
        return tuple(line.strip() for line in text.split("|") if line.strip())

    return Kind(
        verbs=tuple(verbs.split()),
        nouns=tuple(nouns.split()),
        descriptions=lines(descriptions),
        parameters=tuple(parameters),
        requests=lines(requests),
        optional=lines(optional),
    )


KINDS: tuple[Kind, ...] = (
    _k(
        "get fetch check lookup show read",
        "weather forecast current_weather city_weather local_weather weather_report",
        "Get the weather for a city | Current weather at a place | Look up the weather forecast",
        [
            _p("city location place town", "city", "The name of the city"),
            _p("unit units scale", "choice", "The temperature unit", "celsius fahrenheit"),
        ],
        "What is the weather in {0} in {1}? | How is the weather in {0}, in {1}? | Weather for {0} in {1}, please. | "
        "Show me the weather in {0} in degrees {1}.",
        "What is the weather in {0}? | How is the weather in {0}? | Is it raining in {0}? | Weather in {0}? | "
        "what's the weather like in {0}? | Tell me the weather in {0}. | Do I need an umbrella in {0}?",
    ),
    _k(
        "send write mail deliver",
        "email mail message_mail email_message",
        "Send an email | Write an email to somebody",
        [
            _p("to recipient address", "email", "The address of the recipient"),
            _p("subject title", "phrase", "The subject"),
        ],
        'Send an email to {0} with the subject "{1}". | Write to {0}, subject "{1}". | Mail {0} about "{1}". | '
        'Please email {0} with the subject "{1}".',
    ),
    _k(
        "set start create begin",
        "timer countdown alarm_timer kitchen_timer",
        "Start a timer | Set a countdown timer",
        [_p("minutes duration length duration_minutes", "integer", "How long, in minutes")],
        "Set a timer for {0} minutes. | Start a timer of {0} minutes. | Timer for {0} minutes, please. | "
        "Wake me in {0} minutes. | Please count down {0} minutes.",
    ),
    _k(
        "set create add schedule",
        "reminder alert notification note_reminder",
        "Create a reminder | Remind the user of something",
        [_p("text message content", "phrase", "What to be reminded of"), _p("time at when", "time", "The time of day")],
        'Remind me of "{0}" at {1}. | Set a reminder "{0}" for {1}. | At {1}, remind me of "{0}". | '
        'Please remind me at {1}: "{0}".',
    ),
    _k(
        "create add schedule book make",
        "event appointment calendar_event meeting calendar_entry",
        "Add an event to the calendar | Create a calendar event",
        [
            _p("title name summary", "phrase", "The title of the event"),
            _p("date day", "date", "The date"),
            _p("time start start_time", "time", "When it starts"),
        ],
        'Put "{0}" in my calendar on {1} at {2}. | Create an event "{0}" on {1} at {2}. | '
        'Schedule "{0}" for {1}, {2}. | Add "{0}" to the calendar for {1} at {2}.',
        'Put "{0}" in my calendar on {1}. | Create an event "{0}" on {1}. | Add "{0}" to the calendar for {1}.',
    ),
    _k(
        "convert exchange change calculate",
        "currency money currencies amount",
        "Convert money from one currency to another",
        [
            _p("amount value sum", "integer", "How much money"),
            _p("from source from_currency", "currency", "The currency to convert from"),
            _p("to target to_currency", "currency", "The currency to convert to"),
        ],
        "Convert {0} {1} to {2}. | How much is {0} {1} in {2}? | Change {0} {1} into {2}. | What are {0} {1} in {2}?",
    ),
    _k(
        "translate convert render",
        "text phrase sentence words",
        "Translate a text | Translate text into another language",
        [
            _p("text phrase content", "phrase", "The text to translate"),
            _p("language target target_language", "language", "The language to translate into"),
        ],
        'Translate "{0}" into {1}. | What is "{0}" in {1}? | How do you say "{0}" in {1}? | Please translate '
        '"{0}" to {1}.',
    ),
    _k(
        "search find query lookup",
        "web internet online pages web_pages",
        "Search the web | Find pages on the internet",
        [
            _p("query q text search_term", "phrase", "What to search for"),
            _p("limit count max_results", "integer", "How many results"),
        ],
        'Search the web for "{0}" and show {1} results. | Find {1} pages about "{0}". | Look up "{0}" online, '
        "{1} results.",
        'Search the web for "{0}". | Look up "{0}" online. | Find pages about "{0}" on the internet. | Google "{0}".',
    ),
    _k(
        "play start stream",
        "music song track audio",
        "Play a song | Play music",
        [
            _p("title song track name", "phrase", "The title of the song"),
            _p("artist singer by", "name", "Who sings it"),
        ],
        'Play "{0}" by {1}. | Play the song "{0}" by {1}. | I want to hear "{0}" by {1}. | Start "{0}" by {1}.',
        'Play "{0}". | Play the song "{0}". | I want to hear "{0}". | Please play the music "{0}".',
    ),
    _k(
        "get track check lookup",
        "order order_status package delivery shipment",
        "Get the status of an order | Track an order",
        [_p("order_id id order number", "code", "The code of the order")],
        "Where is my order {0}? | Track order {0}. | What is the status of order {0}? | Check the order {0}, please.",
    ),
    _k(
        "get fetch check",
        "stock_price stock share_price quote",
        "Get the price of a stock | Look up a share price",
        [_p("symbol ticker stock", "symbol", "The symbol of the stock")],
        "What is the stock price of {0}? | How much is one share of {0}? | Price of the stock {0}? | Check the "
        "stock {0}.",
    ),
    _k(
        "book reserve order get",
        "table restaurant_table dinner_table",
        "Book a table in a restaurant | Reserve a table",
        [
            _p("restaurant name place", "name", "The restaurant"),
            _p("people guests seats party_size", "integer", "How many people"),
            _p("time at", "time", "The time of day"),
        ],
        "Book a table for {1} people at {0} at {2}. | Reserve a table at {0} for {1} at {2}. | "
        "I need a table for {1} at {2} at {0}.",
        "Book a table for {1} people at {0}. | Reserve a table at {0} for {1}.",
    ),
    _k(
        "book find reserve search",
        "flight plane_ticket flights trip",
        "Book a flight | Find a flight between two cities",
        [
            _p("from origin start departure", "city", "Where the flight starts"),
            _p("to destination arrival", "city", "Where the flight ends"),
            _p("date day departure_date", "date", "The day of the flight"),
        ],
        "Book a flight from {0} to {1} on {2}. | Find a flight from {0} to {1} on {2}. | I want to fly from {0} "
        "to {1} on {2}. | "
        "On {2} I must fly to {1} from {0}.",
        "Find a flight from {0} to {1}. | I want to fly from {0} to {1}. | Are there flights from {0} to {1}?",
    ),
    _k(
        "set switch turn control",
        "light lamp lights lighting",
        "Switch a light on or off | Control the light in a room",
        [_p("room location place", "room", "The room"), _p("state status mode", "choice", "On or off", "on off")],
        "Turn the light in the {0} {1}. | Switch the {0} light {1}. | Light {1} in the {0}, please.",
    ),
    _k(
        "set change adjust",
        "temperature thermostat heating room_temperature",
        "Set the temperature of a room | Adjust the heating",
        [
            _p("room location zone", "room", "The room"),
            _p("degrees temperature value", "integer", "The temperature in degrees"),
        ],
        "Set the {0} to {1} degrees. | Heat the {0} to {1} degrees. | Make it {1} degrees in the {0}.",
    ),
    _k(
        "get calculate find plan",
        "route directions way path",
        "Get directions between two places | Plan a route",
        [
            _p("start from origin", "city", "Where to start"),
            _p("end to destination", "city", "Where to go"),
            _p("mode by vehicle", "choice", "How to travel", "car train bicycle"),
        ],
        "How do I get from {0} to {1} by {2}? | Plan a route from {0} to {1} by {2}. | Directions from {0} to "
        "{1} by {2}.",
        "How do I get from {0} to {1}? | Plan a route from {0} to {1}. | Show me the way from {0} to {1}.",
    ),
    _k(
        "get show find",
        "time local_time clock current_time",
        "Get the local time in a city | What time it is somewhere",
        [_p("city place location timezone_city", "city", "The city")],
        "What time is it in {0}? | Tell me the time in {0}. | How late is it in {0} now? | Current time in {0}?",
    ),
    _k(
        "add append create put",
        "todo task list_item shopping_item",
        "Add an entry to a list | Put something on the list",
        [
            _p("item text entry task", "phrase", "What to add"),
            _p("priority importance level", "choice", "How urgent it is", "low medium high"),
        ],
        'Add "{0}" to my list with {1} priority. | Put "{0}" on the list, priority {1}.',
        'Add "{0}" to my list. | Put "{0}" on the list. | Write "{0}" on my to-do list.',
    ),
    _k(
        "send post write",
        "message text_message chat sms",
        "Send a message to a person | Text somebody",
        [
            _p("to person recipient contact", "name", "Who gets the message"),
            _p("text message body", "phrase", "What to say"),
        ],
        'Send {0} the message "{1}". | Text {0}: "{1}". | Tell {0} "{1}". | Message {0} and say "{1}".',
    ),
    _k(
        "call phone dial ring",
        "contact person number friend",
        "Call a person by phone | Start a phone call",
        [_p("name contact person who", "name", "Who to call")],
        "Call {0}. | Phone {0}, please. | I want to talk to {0} on the phone. | Ring {0} for me.",
    ),
    _k(
        "get find search fetch",
        "recipe dish recipes cooking_recipe",
        "Find a recipe | Get a cooking recipe with an ingredient",
        [
            _p("ingredient food with", "word", "The main ingredient"),
            _p("servings people portions", "integer", "For how many people"),
        ],
        'Find a recipe with "{0}" for {1} people. | How do I cook "{0}" for {1}? | Recipe with "{0}" for {1} '
        "people, please.",
        'Find a recipe with "{0}". | How do I cook "{0}"? | Recipe with "{0}", please.',
    ),
    _k(
        "get lookup find define",
        "definition meaning word_meaning dictionary_entry",
        "Look up a word in the dictionary | Define a word",
        [_p("word term text", "word", "The word")],
        'What does "{0}" mean? | Define "{0}". | Look up the meaning of "{0}". | Definition of "{0}"?',
    ),
    _k(
        "get list show fetch",
        "news headlines articles top_news",
        "Get the latest news | Show news about a topic",
        [_p("topic subject about", "word", "The topic"), _p("count limit number", "integer", "How many articles")],
        'Show {1} news about "{0}". | Give me {1} headlines on "{0}".',
        'What is the news about "{0}"? | Show the latest news on "{0}". | Any headlines about "{0}"?',
    ),
    _k(
        "add multiply calculate compute",
        "numbers sum product math",
        "Calculate with two numbers | Do math on two numbers",
        [_p("a x first", "integer", "The first number"), _p("b y second", "integer", "The second number")],
        "Use the calculator on {0} and {1}. | Run the math tool with {0} and {1}. | Let the tool calculate with "
        "{0} and {1}.",
    ),
)
