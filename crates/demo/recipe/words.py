"""Word lists: the plain facts and nouns from which every training text is built. All of it written for this recipe."""

CAPITALS = dict(
    pair.split(":")
    for pair in """Afghanistan:Kabul|Albania:Tirana|Algeria:Algiers|Andorra:Andorra la Vella|Angola:Luanda|Argentina:Buenos Aires|Armenia:Yerevan|Australia:Canberra|Austria:Vienna|Azerbaijan:Baku|Bahrain:Manama|Bangladesh:Dhaka|Barbados:Bridgetown|Belarus:Minsk|Belgium:Brussels|Bolivia:Sucre|Bosnia:Sarajevo|Botswana:Gaborone|Brazil:Brasilia|Bulgaria:Sofia|Cambodia:Phnom Penh|Cameroon:Yaounde|Canada:Ottawa|Chad:N'Djamena|Chile:Santiago|China:Beijing|Colombia:Bogota|Costa Rica:San Jose|Croatia:Zagreb|Cuba:Havana|Cyprus:Nicosia|Denmark:Copenhagen|Ecuador:Quito|Egypt:Cairo|Estonia:Tallinn|Ethiopia:Addis Ababa|Fiji:Suva|Finland:Helsinki|France:Paris|Gabon:Libreville|Georgia:Tbilisi|Germany:Berlin|Ghana:Accra|Greece:Athens|Guatemala:Guatemala City|Guinea:Conakry|Haiti:Port-au-Prince|Honduras:Tegucigalpa|Hungary:Budapest|Iceland:Reykjavik|India:New Delhi|Indonesia:Jakarta|Iran:Tehran|Iraq:Baghdad|Ireland:Dublin|Israel:Jerusalem|Italy:Rome|Jamaica:Kingston|Japan:Tokyo|Jordan:Amman|Kazakhstan:Astana|Kenya:Nairobi|Kuwait:Kuwait City|Laos:Vientiane|Latvia:Riga|Lebanon:Beirut|Libya:Tripoli|Lithuania:Vilnius|Luxembourg:Luxembourg|Madagascar:Antananarivo|Malaysia:Kuala Lumpur|Mali:Bamako|Malta:Valletta|Mexico:Mexico City|Moldova:Chisinau|Monaco:Monaco|Mongolia:Ulaanbaatar|Montenegro:Podgorica|Morocco:Rabat|Mozambique:Maputo|Namibia:Windhoek|Nepal:Kathmandu|the Netherlands:Amsterdam|New Zealand:Wellington|Nicaragua:Managua|Niger:Niamey|Nigeria:Abuja|North Korea:Pyongyang|Norway:Oslo|Oman:Muscat|Pakistan:Islamabad|Panama:Panama City|Paraguay:Asuncion|Peru:Lima|the Philippines:Manila|Poland:Warsaw|Portugal:Lisbon|Qatar:Doha|Romania:Bucharest|Russia:Moscow|Rwanda:Kigali|Saudi Arabia:Riyadh|Senegal:Dakar|Serbia:Belgrade|Singapore:Singapore|Slovakia:Bratislava|Slovenia:Ljubljana|Somalia:Mogadishu|South Africa:Pretoria|South Korea:Seoul|Spain:Madrid|Sudan:Khartoum|Sweden:Stockholm|Switzerland:Bern|Syria:Damascus|Taiwan:Taipei|Tanzania:Dodoma|Thailand:Bangkok|Tunisia:Tunis|Turkey:Ankara|Uganda:Kampala|Ukraine:Kyiv|the United Kingdom:London|the United States:Washington|Uruguay:Montevideo|Uzbekistan:Tashkent|Venezuela:Caracas|Vietnam:Hanoi|Yemen:Sanaa|Zambia:Lusaka|Zimbabwe:Harare""".split("|")
)

# Countries that people ask about first; they are drawn more often.
FAMILIAR = "Japan France Germany Italy Spain China India Canada Brazil Russia Egypt Norway Sweden Poland Greece Australia Mexico Kenya Ireland Portugal".split()
FAMILIAR += ["the United Kingdom", "the United States"]

OPPOSITES = [
    tuple(pair.split("/"))
    for pair in """hot/cold big/small fast/slow up/down left/right open/closed light/dark day/night happy/sad rich/poor young/old tall/short long/short new/old wet/dry hard/soft loud/quiet early/late full/empty heavy/light clean/dirty strong/weak good/bad high/low near/far thick/thin wide/narrow deep/shallow true/false alive/dead awake/asleep cheap/expensive easy/difficult first/last front/back inside/outside above/below begin/end push/pull give/take buy/sell win/lose love/hate arrive/leave come/go friend/enemy war/peace north/south east/west black/white male/female sweet/sour sharp/blunt smooth/rough safe/dangerous simple/complex same/different always/never everything/nothing before/after more/less many/few over/under on/off in/out yes/no rise/fall laugh/cry accept/refuse add/subtract multiply/divide ancient/modern brave/cowardly bright/dim calm/nervous careful/careless polite/rude proud/humble public/private question/answer raw/cooked remember/forget save/spend silent/noisy start/finish success/failure summer/winter tight/loose ugly/beautiful warm/cool wild/tame wise/foolish absent/present attack/defend blame/praise borrow/lend build/destroy generous/selfish guilty/innocent increase/decrease import/export junior/senior lucky/unlucky major/minor natural/artificial optimist/pessimist positive/negative possible/impossible useful/useless victory/defeat visible/invisible""".split()
]

CATEGORIES = {
    "animal": "cat dog horse cow sheep goat fox wolf bear lion tiger rabbit mouse elephant monkey whale shark owl eagle duck frog snake bee otter".split(),
    "fruit": "apple pear plum cherry grape banana orange lemon peach mango melon fig".split(),
    "colour": "red blue green yellow purple pink brown grey white black".split(),
    "vehicle": "car bus train bicycle truck boat ship tram plane tractor".split(),
    "tool": "hammer saw drill spade rake axe chisel shovel".split(),
    "instrument": "piano violin guitar flute drum trumpet harp cello".split(),
    "vegetable": "carrot onion potato cabbage turnip leek spinach".split(),
    "tree": "oak pine birch willow maple elm ash spruce".split(),
}

NAMES = """Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Mia Noah Olga Paul Quinn Rosa Sam Tina Uma Victor Wendy Xavier Yara Zoe Adam Bella Carlos Diana Erik Fatima George Hana Ivan Julia Karim Lena Marco Nina Oscar Priya Raj Sara Tom Ursula Vera Walter Yuki Alice Bruno Chloe Daniel Elena Frank Gina Hugo Iris James Karen Lucas Maria Nora Omar Peter Ravi Sofia Theo Vivian William Aisha Boris Celia Dora Eli Freya Gustav Helen Igor Jonas Kira Liam Mona Nadia Otto Petra Rita Simon Tara Anders Lucy Max Ella Arthur Ruth Milo Stella""".split()

CITIES = """Paris London Oslo Rome Berlin Madrid Lisbon Vienna Dublin Tokyo Cairo Lima Seoul Delhi Athens Prague Warsaw Boston Chicago Denver Toronto Sydney Geneva Munich Milan Porto Bergen Turin Lyon Leeds Glasgow Kyoto Osaka Mumbai Quito Havana Nairobi Accra Dakar Bern Zurich Hamburg Naples Seville Krakow Riga Vilnius Tallinn Helsinki Stockholm""".split()

COLOURS = "red blue green yellow purple pink brown grey white black orange golden silver".split()

THINGS = """apple book chair table lamp door window key clock cup plate spoon fork knife bottle basket box bag hat coat shoe glove scarf ring coin map letter stamp pen pencil paper ruler brush mirror candle pillow blanket carpet bell drum flute violin ball kite rope ladder bucket broom hammer nail saw wheel cart boat ship bridge tower castle garden river lake forest mountain island cloud star moon sun stone shell feather leaf flower seed root branch bird fish horse goat cat dog mouse fox bear wolf owl frog bee ant bread cheese butter milk honey sugar salt pepper soup rice bean pea corn potato onion carrot pear plum grape lemon peach cherry nut egg cake pie jam tea coffee water juice train truck bicycle engine radio camera phone robot rocket""".split()

HEROES = "fox owl bear rabbit mouse cat dog robot girl boy king queen wizard sailor farmer baker painter dragon horse frog turtle wolf bee knight teacher pirate giant fisherman squirrel hedgehog".split()
TREASURES = "lamp key river map boat star bridge clock garden kite drum letter mirror stone tree candle bell book lantern castle mountain ring cake shell cloud feather island train ladder cheese".split()

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
LANGUAGES = "French German Spanish Italian Polish Greek Dutch Swedish Turkish Korean Hindi Arabic".split()
JOBS = "teacher doctor baker pilot painter farmer nurse singer lawyer cook driver writer gardener plumber engineer".split()
NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty".split()

SYLLABLES = "ba be bo da de di do fa fe ga go ka ke ki ko la le li lo lu ma me mi mo na ne ni no pa pe po ra re ri ro sa se si so ta te ti to tu va ve vi wa we wi za zo sha tri bra cla dro fro gri plu sten mor lin dan tor vel nix rum".split()


def made_up_word(rng):
    """A word that no list contains, so that copying is learned and not the words."""
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((2, 2, 3))))


def name(rng):
    """Mostly a listed first name, sometimes a made-up one."""
    return rng.choice(NAMES) if rng.random() < 0.7 else made_up_word(rng).capitalize()


def city(rng):
    return rng.choice(CITIES) if rng.random() < 0.75 else made_up_word(rng).capitalize()


def thing(rng):
    return rng.choice(THINGS) if rng.random() < 0.8 else made_up_word(rng)


def article(word):
    return ("an " if word[0] in "aeiou" else "a ") + word
