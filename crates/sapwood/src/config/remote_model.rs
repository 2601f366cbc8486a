//! A model of LMTP servers, named by one URL (D-40).

use std::path::PathBuf;

use percent_encoding::percent_decode_str;
use sapwood_net::lmtp::PeerAddress;
use sapwood_proto::lmtp::{LmtpError, LmtpReason};

/// `lmtp://HOST:PORT[,HOST:PORT]/MODEL[?tokenizer=PATH][&key=KEY]`.
#[derive(Debug)]
pub(crate) struct RemoteModel {
    /// The servers, each with the key that its own query has.
    pub(crate) peers: Vec<PeerAddress>,
    /// The name of the model at the servers.
    pub(crate) model: String,
    /// Path of `tokenizer.json`, or of its folder, for servers that do not provide theirs.
    pub(crate) tokenizer: Option<PathBuf>,
}

impl RemoteModel {
    /// Parses a URL. A path has `%26` for `&` and `%25` for `%`; it is relative to the working directory, unless it is
    /// absolute.
    ///
    /// # Errors
    /// `invalid_value`, with the part that cannot be used.
    pub(crate) fn read(url: &str) -> Result<Self, LmtpError> {
        let (target, query) = url.split_once('?').unwrap_or((url, ""));
        let mut tokenizer = None;
        let mut theirs = Vec::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            match pair.split_once('=').unwrap_or((pair, "")) {
                (TOKENIZER, _) if tokenizer.is_some() => {
                    return Err(bad("it names two tokenizers, and a model has one"));
                }
                (TOKENIZER, path) => tokenizer = Some(decoded(path)?),
                // Passed on with its address (LM-108), and never printed.
                ("key", _) => theirs.push(pair),
                // A word without a name may be a key whose name was forgotten, so it is not printed.
                _ if !pair.contains('=') => {
                    return Err(bad(
                        "its query has a parameter without a value; write ?tokenizer=PATH or ?key=KEY",
                    ));
                }
                (unknown, _) => {
                    return Err(bad(&format!(
                        "its query has an unknown parameter '{unknown}'; there are 'tokenizer' (a tokenizer.json, or the folder that \
                         it stands in) and 'key' (which goes to the server)"
                    )));
                }
            }
        }
        let question = if theirs.is_empty() { "" } else { "?" };
        let (peers, model) =
            PeerAddress::of_model(&format!("{target}{question}{}", theirs.join("&")))?;
        Ok(Self {
            peers,
            model,
            tokenizer,
        })
    }
}

fn decoded(path: &str) -> Result<PathBuf, LmtpError> {
    if path.is_empty() {
        return Err(bad("its tokenizer needs a path: ?tokenizer=PATH"));
    }
    let path = percent_decode_str(path).decode_utf8();
    let path = path.map_err(|_| bad("the path of its tokenizer is not UTF-8"))?;
    Ok(PathBuf::from(path.into_owned()))
}

fn bad(why: &str) -> LmtpError {
    LmtpError::new(
        LmtpReason::InvalidValue,
        format!("the address of a model of an LMTP server cannot be used: {why}"),
    )
}

const TOKENIZER: &str = "tokenizer";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lm_712_a_url_may_name_a_tokenizer_and_unknown_parameters_are_refused() {
        for (url, peers, model, tokenizer) in [
            ("lmtp://a:1/tiny", "[a:1]", "tiny", None),
            (
                "lmtp://a:1,b:2/tiny?tokenizer=here/tokenizer.json",
                "[a:1, b:2]",
                "tiny",
                Some("here/tokenizer.json"),
            ),
            (
                "lmtp://a:1/tiny?key=k&tokenizer=/the%20folder/100%25%26more",
                "[a:1]",
                "tiny",
                Some("/the folder/100%&more"),
            ),
            ("lmtp://a:1/tiny?key=k", "[a:1]", "tiny", None),
            ("lmtp://a:1/tiny?", "[a:1]", "tiny", None),
        ] {
            let read = RemoteModel::read(url).unwrap();
            assert_eq!(format!("{:?}", read.peers), peers, "{url}");
            assert_eq!(read.model, model, "{url}");
            assert_eq!(read.tokenizer.as_deref(), tokenizer.map(AsRef::as_ref));
        }
        for (url, states) in [
            ("lmtp://a:1/tiny?tokeniser=x", "'tokeniser'"),
            ("lmtp://a:1/tiny?tokenizer", "?tokenizer=PATH"),
            ("lmtp://a:1/tiny?tokenizer=", "?tokenizer=PATH"),
            ("lmtp://a:1/tiny?tokenizer=x&tokenizer=y", "two tokenizers"),
            ("lmtp://a:1/tiny?tokenizer=%ff", "not UTF-8"),
            ("lmtp://a:1?tokenizer=x", "MODEL"),
        ] {
            let error = RemoteModel::read(url).unwrap_err();
            assert_eq!(error.reason, LmtpReason::InvalidValue, "{url}");
            assert!(error.message.contains(states), "{url}: {}", error.message);
        }
    }
}
