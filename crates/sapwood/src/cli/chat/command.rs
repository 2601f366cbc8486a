//! Parses a line of a chat.

/// A parsed line.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ChatCommand<'a> {
    Nothing,
    Ask(&'a str),
    Help,
    New,
    Quit,
    /// Asks the last question again.
    Retry,
    /// With a text sets the value, without shows it; `-` removes it.
    System(&'a str),
    Model(&'a str),
    Temperature(&'a str),
    Save(&'a str),
    /// An unknown command.
    Unknown(&'a str),
}

impl<'a> ChatCommand<'a> {
    pub(super) fn read(line: &'a str) -> Self {
        let line = line.trim();
        if !line.starts_with('/') {
            return if line.is_empty() {
                Self::Nothing
            } else {
                Self::Ask(line)
            };
        }
        let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim();
        match name {
            "/help" => Self::Help,
            "/new" => Self::New,
            "/quit" | "/exit" => Self::Quit,
            "/retry" => Self::Retry,
            "/system" => Self::System(rest),
            "/model" => Self::Model(rest),
            "/temperature" => Self::Temperature(rest),
            "/save" => Self::Save(rest),
            other => Self::Unknown(other),
        }
    }
}

pub(super) const HELP: &str = "\
/new               start a new conversation
/retry             ask the last question again
/system [TEXT]     set the system message; without TEXT, show it; /system - removes it
/model [NAME]      use another model; without NAME, list them
/temperature [X]   0 takes the likeliest token, higher varies more; without X, show it; - goes back to the model's own
/save FILE         write the conversation to a file, as JSON if its name ends in .json
/quit              quit; so do Ctrl-D, and Ctrl-C while no answer is running
Ctrl-C             stop an answer";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_a_command_or_a_question() {
        for (line, command) in [
            ("  ", ChatCommand::Nothing),
            (" What? ", ChatCommand::Ask("What?")),
            ("/new", ChatCommand::New),
            ("/exit ", ChatCommand::Quit),
            ("/retry", ChatCommand::Retry),
            ("/system", ChatCommand::System("")),
            ("/system  Be brief. ", ChatCommand::System("Be brief.")),
            ("/systematic", ChatCommand::Unknown("/systematic")),
            ("/model\tb", ChatCommand::Model("b")),
            ("/temperature 0.2", ChatCommand::Temperature("0.2")),
            ("/save a b.txt", ChatCommand::Save("a b.txt")),
            ("/", ChatCommand::Unknown("/")),
        ] {
            assert_eq!(ChatCommand::read(line), command, "{line}");
        }
    }
}
